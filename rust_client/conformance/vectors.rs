//! Reads the golden vectors, and computes this client's answer to each case.
#![allow(clippy::needless_update)] // literals of messages end with `..`, for later fields

use crate::{memfd, sequences};
use serde::de::DeserializeOwned;
use serde::Serialize;
use serde_json::{json, Value};
use std::convert::TryInto;
use std::fs;
use std::io;
use std::path::Path;
use std::time::Duration;
use weightbus::casting::cast;
use weightbus::checksum::crc32c;
use weightbus::delta::{self, Patch, PatchError, Side};
use weightbus::digest::{bytes_of_hex, digest, digest_of, hex};
use weightbus::keyring::Keyring;
use weightbus::layout::Layout;
use weightbus::messages::{encode, from_publisher, from_worker, Shared};
use weightbus::phases::{next, COMING, LACKS, MODES, SESSIONS, TRANSITIONS};
use weightbus::sealing::{nonce_of, GroupKey, Opening, Subject};
use weightbus::segment::{Segment, Stamp};
use weightbus::transfer::ChunkPlan;
use weightbus::Dtype;

/// This client's answer to a case; `None` if the case is not about workers.
pub type Answer = Option<Value>;

/// Returns, for each case: the file, the name, the case itself, and the answer.
pub fn answers(folder: &Path) -> io::Result<Vec<(&'static str, String, Value, Answer)>> {
    type Answers = fn(&Path, &Value) -> io::Result<Answer>;
    let tables: [(&'static str, &[(&str, Answers)]); 17] = [
        ("messages.json", &[("cases", message)]),
        ("sources.json", &[("cases", message)]),
        ("layouts.json", &[("cases", layout)]),
        ("chunks.json", &[("cases", chunks)]),
        ("checksums.json", &[("crc32c", checksum), ("digests", digest_of_parts)]),
        ("versions.json", &[("cases", version)]),
        ("segments.json", &[("cases", segment)]),
        ("sequences.json", &[("cases", sequences::play)]),
        ("phases.json", &[("cases", phase)]),
        ("applying.json", &[("messages", message), ("sequences", sequences::play)]),
        ("casts.json", &[("cases", casts)]),
        ("deltas.json", &[("cases", delta)]),
        ("patching.json", &[("headers", message)]),
        ("metadata.json", &[("messages", message)]),
        ("renaming.json", &[("messages", message), ("sequences", sequences::play)]),
        ("companions.json", &[("sequences", sequences::play)]),
        (
            "sealing.json",
            &[
                ("keys", group_key),
                ("versions", key_of_version),
                ("payloads", sealed),
                ("messages", counted),
                ("headers", message),
            ],
        ),
    ];
    let mut found = Vec::new();
    for (file, lists) in tables {
        let table: Value = serde_json::from_slice(&fs::read(folder.join(file))?)?;
        for (list, answer) in lists {
            let cases = table[list].as_array().ok_or_else(|| broken(&format!("{} in {}", list, file)))?;
            for (index, case) in cases.iter().enumerate() {
                let name = case["name"].as_str().map_or_else(|| index.to_string(), str::to_owned);
                let name = if lists.len() > 1 { format!("{}/{}", list, name) } else { name };
                found.push((file, name, case.clone(), answer(folder, case)?));
            }
        }
    }
    Ok(found)
}

pub fn broken(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("the vectors have no {}", what))
}

pub fn bytes(folder: &Path, spec: &Value) -> io::Result<Vec<u8>> {
    if let Some(text) = spec["text"].as_str() {
        return Ok(text.as_bytes().to_vec());
    }
    match (spec["hex"].as_str(), spec["file"].as_str()) {
        (Some(digits), _) => Ok(bytes_of_hex(digits)),
        (_, Some(file)) => fs::read(folder.join(file)),
        _ => Err(broken("bytes of a known kind")),
    }
}

fn text<'a>(case: &'a Value, field: &str) -> io::Result<&'a str> {
    case[field].as_str().ok_or_else(|| broken(field))
}

fn number(case: &Value, field: &str) -> io::Result<u64> {
    case[field].as_u64().ok_or_else(|| broken(field))
}

fn error(code: &str) -> io::Result<Answer> {
    Ok(Some(json!({ "error": code })))
}

fn message(folder: &Path, case: &Value) -> io::Result<Answer> {
    if text(case, "direction")? == "from_worker" {
        return sent(case);
    }
    let frames = case["frames"].as_array().ok_or_else(|| broken("frames"))?;
    let frames: Vec<Vec<u8>> = frames.iter().map(|spec| bytes(folder, spec)).collect::<io::Result<_>>()?;
    let header = frames.first().map_or(&[][..], |frame| &frame[..]);
    let payloads = frames.len().saturating_sub(1);
    match from_publisher(header, payloads) {
        Ok(message) => Ok(Some(json!({ "ok": serde_json::to_value(&message)?, "payloads": payloads }))),
        Err(refused) => error(refused.code()),
    }
}

/// Returns the header that this client sends for the fields of a case.
fn sent(case: &Value) -> io::Result<Answer> {
    let mut fields = match case["expect"]["ok"].as_object() {
        Some(fields) => fields.clone(),
        None => return Ok(None),
    };
    fields.insert("wbp".to_owned(), json!(1));
    let message = from_worker(&serde_json::to_vec(&fields)?, 0);
    let message = message.map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error.to_string()))?;
    Ok(Some(json!({ "header": String::from_utf8_lossy(&encode(&message)) })))
}

fn layout(folder: &Path, case: &Value) -> io::Result<Answer> {
    let layout = match Layout::parse(&bytes(folder, &case["header"])?) {
        Ok(layout) => layout,
        Err(_) => return error("layout-invalid"),
    };
    let tensors: Vec<Value> = layout
        .tensors
        .iter()
        .map(|t| json!({ "name": t.name, "dtype": t.dtype.name(), "shape": t.shape, "begin": t.begin, "end": t.end }))
        .collect();
    Ok(Some(json!({ "ok": {
        "id": layout.id,
        "nbytes": layout.nbytes,
        "tensors": tensors,
        "aliases": layout.aliases,
        "metadata": layout.metadata,
        "order": layout.in_order().map(|tensor| &tensor.name).collect::<Vec<_>>(),
    }})))
}

fn chunks(_folder: &Path, case: &Value) -> io::Result<Answer> {
    let chunk_bytes = case["chunk_bytes"].as_u64().unwrap_or(0); // a negative size is invalid, like 0
    let plan = match ChunkPlan::new(number(case, "nbytes")?, chunk_bytes) {
        Some(plan) => plan,
        None => return error("chunk-bytes"),
    };
    let spans = (0..plan.count()).map(|index| plan.span(index));
    let spans: Vec<[u64; 2]> = spans.map(|span| [span.start, span.end]).collect();
    Ok(Some(json!({ "ok": { "count": plan.count(), "spans": spans } })))
}

fn checksum(_folder: &Path, case: &Value) -> io::Result<Answer> {
    Ok(Some(json!({ "crc": crc32c(&bytes_of_hex(text(case, "hex")?)) })))
}

fn digest_of_parts(_folder: &Path, case: &Value) -> io::Result<Answer> {
    let crcs = case["crcs"].as_array().ok_or_else(|| broken("crcs"))?;
    let crcs: Vec<u32> = crcs.iter().filter_map(Value::as_u64).map(|crc| crc as u32).collect();
    Ok(Some(json!({ "digest": digest(text(case, "layout")?, number(case, "chunk_bytes")?, &crcs) })))
}

/// Returns the digest of a safetensors file.
fn version(folder: &Path, case: &Value) -> io::Result<Answer> {
    let file = fs::read(folder.join(text(case, "file")?))?;
    let (header, data) = file.split_at(number(case, "layout_bytes")? as usize);
    let layout = Layout::parse(header).map_err(|error| broken(&error.to_string()))?;
    let chunk_bytes = number(case, "chunk_bytes")?;
    let plan = ChunkPlan::new(data.len() as u64, chunk_bytes).ok_or_else(|| broken("chunk size"))?;
    let spans = (0..plan.count()).map(|index| plan.span(index));
    let crcs: Vec<u32> = spans.map(|span| crc32c(&data[span.start as usize..span.end as usize])).collect();
    Ok(Some(json!({ "digest": digest(&layout.id, chunk_bytes, &crcs) })))
}

/// Returns the state after an event, by the tables of this client.
fn phase(_folder: &Path, case: &Value) -> io::Result<Answer> {
    let of = |table: fn(&Value) -> serde_json::Result<Value>| table(case).map_err(io::Error::from);
    Ok(Some(json!({ "next": match text(case, "of")? {
        "version" => of(|case| next_of(TRANSITIONS, case))?,
        "announced" => of(|case| next_of(LACKS, case))?,
        "arriving" => of(|case| next_of(COMING, case))?,
        "model" => of(|case| next_of(MODES, case))?,
        _ => of(|case| next_of(SESSIONS, case))?,
    } })))
}

/// Returns the state after an event, by one table.
pub fn next_of<S, E>(table: &[(S, E, S)], case: &Value) -> serde_json::Result<Value>
where
    S: Copy + PartialEq + DeserializeOwned + Serialize,
    E: Copy + PartialEq + DeserializeOwned,
{
    let (state, event) = (S::deserialize(&case["state"])?, E::deserialize(&case["event"])?);
    serde_json::to_value(next(table, state, event))
}

fn segment(folder: &Path, case: &Value) -> io::Result<Answer> {
    let (_file, path) = memfd::segment(&fs::read(folder.join(text(case, "file")?))?)?;
    let shared = Shared { path, token: text(case, "token")?.to_owned(), ..Default::default() };
    let segment = match Segment::open(&shared, number(case, "nbytes")?) {
        Some(segment) => segment,
        None => return error("segment"),
    };
    let version = &case["version"];
    if version.is_null() {
        return Ok(Some(json!({ "ok": { "data": "" } })));
    }
    let stamp = Stamp::new(text(version, "model")?, number(version, "epoch")?, number(version, "version")?);
    let read = segment.read(&stamp, |memory| {
        let mut data = vec![0; memory.nbytes()];
        memory.copy_to(0, &mut data);
        hex(&data)
    });
    match read {
        Ok(data) => Ok(Some(json!({ "ok": { "data": data } }))),
        Err(_) => error("stale"),
    }
}

fn subject(case: &Value) -> io::Result<Subject> {
    let of = &case["version"];
    Ok(Subject {
        model: text(of, "model")?.to_owned(),
        epoch: number(of, "epoch")?,
        version: number(of, "version")?,
        nbytes: number(of, "nbytes")?,
        chunk_bytes: number(of, "chunk_bytes")?,
        encoding: text(of, "encoding")?.to_owned(),
        base: serde_json::from_value(of["base"].clone())?,
    })
}

fn group_key(_folder: &Path, case: &Value) -> io::Result<Answer> {
    let key = GroupKey::of_hex(text(case, "group")?);
    Ok(Some(json!({ "ok": { "id": key.id, "messages": hex(&key.message_key) } })))
}

fn key_of_version(_folder: &Path, case: &Value) -> io::Result<Answer> {
    let subject = subject(case)?;
    let key = GroupKey::of_hex(text(case, "group")?).version_key(&subject);
    Ok(Some(json!({ "ok": { "names": hex(&subject.names()), "key": hex(&key) } })))
}

fn sealed(_folder: &Path, case: &Value) -> io::Result<Answer> {
    let (subject, index) = (subject(case)?, number(case, "index")?);
    let purpose = number(case, "purpose")? as u32;
    let (sealed, tag) = (bytes_of_hex(text(case, "sealed")?), bytes_of_hex(text(case, "tag")?));
    let tag = tag.try_into().map_err(|_| broken("tag of 16 bytes"))?;
    let key = GroupKey::of_hex(text(case, "group")?).version_key(&subject);
    let (nonce, bound) = (nonce_of(purpose, index), subject.associated(purpose, index, sealed.len() as u64));
    let mut plain = vec![0; sealed.len()];
    let opened =
        Opening::new(&key, &nonce, &bound, tag).and_then(|opening| opening.decrypt(&sealed, &mut plain));
    match opened {
        Some(crc) => Ok(Some(json!({ "ok": {
            "plain": hex(&plain), "crc": crc, "nonce": hex(&nonce), "associated": hex(&bound),
        }}))),
        None => error("sealed"),
    }
}

/// Returns the message in each of several published headers; `None` for a header that is rejected, for
/// example as a replay.
fn counted(_folder: &Path, case: &Value) -> io::Result<Answer> {
    let mut keyring = Keyring::default();
    keyring.begin(&serde_json::from_value::<Vec<String>>(case["keys"].clone())?, Duration::from_secs(5));
    let mut counts = Vec::new();
    for said in case["messages"].as_array().ok_or_else(|| broken("messages"))? {
        let message = from_publisher(text(said, "header")?.as_bytes(), 0);
        let found = message.ok().and_then(|message| keyring.published(message, 0, true));
        counts.push(found.map(|found| serde_json::to_value(&found)).transpose()?);
    }
    Ok(Some(json!({ "counts": counts })))
}

fn casts(_folder: &Path, case: &Value) -> io::Result<Answer> {
    let dtype = |field| Dtype::named(text(case, field)?).ok_or_else(|| broken("known dtype"));
    let (from, to, source) = (dtype("from")?, dtype("to")?, bytes_of_hex(text(case, "in")?));
    let mut target = vec![0; source.len() * to.bits() as usize / from.bits() as usize];
    cast(from, &source, to, &mut target);
    Ok(Some(json!({ "out": hex(&target) })))
}

/// Makes patches from one version to another, and checks each patch. Returns the digest of the target.
fn check_own_patches(layout: &Layout, base: &[u8], target: &[u8]) -> Result<String, PatchError> {
    const CHUNK_BYTES: u64 = 1 << 12;
    let [before, after] = [base, target].map(|data| digest_of(&layout.id, CHUNK_BYTES, data));
    let (old, new) = (Side { data: base, digest: &before }, Side { data: target, digest: &after });
    for classes in [false, true] {
        let patch = delta::encode(layout, CHUNK_BYTES, old, new, classes, &|| true)?;
        let patch = Patch::parse(layout, &patch)?;
        patch.compare(base, target, &|| true)?;
        patch.apply(&mut base.to_vec(), None)?;
    }
    Ok(after)
}

fn delta(folder: &Path, case: &Value) -> io::Result<Answer> {
    let header = bytes(folder, &case["layout"])?;
    let layout = Layout::parse(&header).map_err(|error| broken(&error.to_string()))?;
    let mut data = Vec::new();
    for run in case["base"].as_array().into_iter().flatten() {
        let times = run[1].as_u64().ok_or_else(|| broken("base"))?;
        data.extend(bytes_of_hex(run[0].as_str().unwrap_or_default()).repeat(times as usize));
    }
    let (patch, before) = (bytes(folder, &case["patch"])?, data.clone());
    match Patch::parse(&layout, &patch).and_then(|patch| patch.apply(&mut data, None)) {
        Ok(()) => match check_own_patches(&layout, &before, &data) {
            Ok(digest) => Ok(Some(json!({ "ok": { "digest": digest } }))),
            Err(fault) => Ok(Some(json!({ "error": format!("another patch between them: {}", fault) }))),
        },
        Err(_) if data == before || case["name"] == "another target" => error("patch"),
        Err(refused) => Ok(Some(json!({ "error": format!("{}, but bytes have changed", refused) }))),
    }
}
