//! Every golden vector, as the conformance suite asks it, compared with what is expected.

mod defaults;
#[path = "../conformance/memfd.rs"]
mod memfd;
#[path = "../conformance/sequences.rs"]
mod sequences;
#[path = "../conformance/vectors.rs"]
mod vectors;

use defaults::Defaults;
use serde_json::{json, Value};
use std::collections::BTreeSet;
use std::path::Path;
use weightbus::casting::cast;
use weightbus::digest::bytes_of_hex;
use weightbus::phases::{DECISIONS, TARGETS, VERSIONS, WORKERS};
use weightbus::Dtype;

#[test]
fn every_case_is_answered_as_expected() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/vectors");
    let answers = vectors::answers(&folder).expect("the vectors can be read");
    assert!(answers.len() > 500, "only {} cases", answers.len());
    let defaults = Defaults::read();
    for (file, name, case, answer) in answers {
        if let Some(answer) = answer {
            assert!(agrees(&defaults, &case, &answer), "{} {}: {}", file, name, answer);
        }
    }
}

#[test]
fn a_publisher_has_the_tables_of_the_vectors() {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/vectors/publisher_phases.json");
    let table: Value = serde_json::from_slice(&std::fs::read(file).unwrap()).unwrap();
    for case in table["cases"].as_array().unwrap() {
        let next = match case["of"].as_str().unwrap() {
            "worker on the roster" => vectors::next_of(WORKERS, case),
            "target" => vectors::next_of(TARGETS, case),
            "decision" => vectors::next_of(DECISIONS, case),
            _ => vectors::next_of(VERSIONS, case),
        };
        assert_eq!(next.unwrap(), case["next"], "{}", case);
    }
}

/// Every NaN is as good as another.
fn same_values(dtype: &Value, wanted: &Value, found: &Value) -> bool {
    let dtype = dtype.as_str().and_then(Dtype::named).expect("a dtype");
    let values = |hex: &Value| -> Vec<f64> {
        let bytes = bytes_of_hex(hex.as_str().expect("bytes"));
        let mut wide = vec![0; bytes.len() * 64 / dtype.bits() as usize];
        match dtype {
            Dtype::F64 => wide = bytes,
            _ => cast(dtype, &bytes, Dtype::F64, &mut wide),
        }
        wide.chunks_exact(8).map(|value| f64::from_le_bytes(value.try_into().unwrap())).collect()
    };
    let (wanted, found) = (values(wanted), values(found));
    let same = |(a, b): (&f64, &f64)| a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan());
    wanted.len() == found.len() && wanted.iter().zip(&found).all(same)
}

fn agrees(defaults: &Defaults, case: &Value, answer: &Value) -> bool {
    if let Some(steps) = answer.get("steps") {
        return played_well(defaults, case, steps);
    }
    let expect = &case["expect"];
    if let Some(header) = answer.get("header") {
        let mut wanted = expect["ok"].clone();
        wanted["wbp"] = json!(1);
        let found = serde_json::from_str(header.as_str().unwrap_or_default()).unwrap_or(Value::Null);
        return defaults.filled(found) == defaults.filled(wanted);
    }
    for direct in ["crc", "digest", "next"] {
        if let Some(found) = answer.get(direct) {
            return *found == case[direct];
        }
    }
    if let Some(counts) = answer.get("counts") {
        return counted_well(defaults, case, counts);
    }
    if let Some(out) = answer.get("out") {
        return same_values(&case["to"], &case["out"], out);
    }
    if let Some(code) = answer.get("error") {
        return Some(code) == expect.get("error");
    }
    let payloads = answer.get("payloads").map_or(true, |count| *count == expect["payloads"]);
    let sorted = |result: &Value| defaults.filled(sorted(&result["ok"]));
    payloads && sorted(answer) == sorted(expect)
}

/// Of each message, what counts of it.
fn counted_well(defaults: &Defaults, case: &Value, counts: &Value) -> bool {
    let (said, counts) = (case["messages"].as_array(), counts.as_array());
    let mut pairs = said.into_iter().flatten().map(|said| &said["counts"]).zip(counts.into_iter().flatten());
    said.map(Vec::len) == counts.map(Vec::len)
        && pairs.all(|(wanted, found)| match wanted.as_object() {
            Some(wanted) => {
                let found = defaults.filled(found.clone());
                wanted.iter().all(|(name, value)| name == "wbp" || found.get(name) == Some(value))
            }
            None => found.is_null(),
        })
}

/// Tensors that lie at the same place have no order.
fn sorted(ok: &Value) -> Value {
    let mut ok = ok.clone();
    if let Some(tensors) = ok.get_mut("tensors").and_then(Value::as_array_mut) {
        tensors.sort_by_key(|t| (t["begin"].as_u64(), t["end"].as_u64(), t["name"].to_string()));
    }
    ok
}

/// What `tests/vectors/README.md` says of sequences.
fn played_well(defaults: &Defaults, case: &Value, steps: &Value) -> bool {
    let none = Vec::new();
    let list = |value: &Value| value.as_array().unwrap_or(&none).clone();
    let (expected, played) = (list(&case["steps"]), list(steps));
    let mut asked = BTreeSet::new();
    expected.len() == played.len()
        && expected.iter().zip(&played).all(|(step, played)| {
            let (expect, sent) = (&step["expect"], list(&played["sent"]));
            let sent: Vec<Value> = sent.into_iter().map(|each| defaults.filled(each)).collect();
            asked.extend(sent.iter().filter(|header| header["type"] == "fetch").flat_map(chunks_of));
            let sends = list(&expect["sends"])
                .iter()
                .all(|wanted| sent.iter().any(|header| contains(header, wanted)));
            let silent = list(&expect["silent"]);
            let quiet = sent.iter().all(|header| !silent.contains(&header["type"]));
            let asks = match expect.get("asks") {
                Some(asks) => {
                    list(asks).iter().filter_map(Value::as_u64).collect::<BTreeSet<u64>>()
                        == std::mem::take(&mut asked)
                }
                None => true,
            };
            let runs = expect["runs"].as_object().into_iter().flatten();
            let mut runs = runs.map(|(model, version)| (version.as_u64(), played["runs"][model].as_u64()));
            sends && quiet && asks && runs.all(|(wanted, found)| wanted == Some(found.unwrap_or(0)))
        })
}

fn chunks_of(fetch: &Value) -> std::ops::Range<u64> {
    let first = fetch["first"].as_u64().unwrap_or(0);
    first..first + fetch["count"].as_u64().unwrap_or(0)
}

/// Whether a value is the one wanted; an object may have other fields beside.
fn contains(value: &Value, wanted: &Value) -> bool {
    match (value, wanted) {
        (Value::Object(fields), Value::Object(wanted)) => wanted
            .iter()
            .all(|(name, wanted)| fields.get(name).map_or(false, |value| contains(value, wanted))),
        _ => value == wanted,
    }
}

#[test]
#[cfg(feature = "keys")]
fn what_is_sealed_is_what_the_vectors_have() {
    use weightbus::base64;
    use weightbus::sealing::{nonce_of, seal, GroupKey, Subject};
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/vectors/sealing.json");
    let table: Value = serde_json::from_slice(&std::fs::read(file).unwrap()).unwrap();
    let bytes = |value: &Value| bytes_of_hex(value.as_str().unwrap());
    let sound = |case: &&Value| case["expect"]["ok"].is_object();
    let mut count = 0;
    for case in table["payloads"].as_array().unwrap().iter().filter(sound) {
        let (of, plain) = (&case["version"], bytes(&case["expect"]["ok"]["plain"]));
        let number = |value: &Value| value.as_u64().unwrap();
        let subject = Subject {
            model: of["model"].as_str().unwrap().to_owned(),
            epoch: number(&of["epoch"]),
            version: number(&of["version"]),
            nbytes: number(&of["nbytes"]),
            chunk_bytes: number(&of["chunk_bytes"]),
            encoding: of["encoding"].as_str().unwrap().to_owned(),
            base: (number(&of["base"][0]), number(&of["base"][1])),
        };
        let (purpose, index) = (number(&case["purpose"]) as u32, number(&case["index"]));
        let key = GroupKey::of_hex(case["group"].as_str().unwrap()).version_key(&subject);
        let bound = subject.associated(purpose, index, plain.len() as u64);
        let mut sealed = vec![0; plain.len()];
        let tag = seal(&key, &nonce_of(purpose, index), &bound, &plain, &mut sealed).unwrap();
        assert_eq!((sealed, tag.to_vec()), (bytes(&case["sealed"]), bytes(&case["tag"])), "{}", case["name"]);
        count += 1;
    }
    for case in table["messages"].as_array().unwrap() {
        let group = GroupKey::of_hex(case["keys"][0].as_str().unwrap());
        for said in case["messages"].as_array().unwrap().iter().filter(|said| said["counts"].is_object()) {
            let header: Value = serde_json::from_str(said["header"].as_str().unwrap()).unwrap();
            let (number, text) = (header["count"].as_u64().unwrap(), header["sealed"].as_str().unwrap());
            let plain = group.open_message(number, &base64::decode(text).unwrap()).unwrap();
            assert_eq!(base64::encode(&group.seal_message(number, &plain).unwrap()), text);
            count += 1;
        }
    }
    assert!(count > 10, "only {} cases", count);
}
