//! Every golden vector, as the conformance suite asks it, compared with what is expected.

#[path = "../conformance/memfd.rs"]
mod memfd;
#[path = "../conformance/vectors.rs"]
mod vectors;

use serde_json::{json, Value};
use std::path::Path;

#[test]
fn every_case_is_answered_as_expected() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/vectors");
    let answers = vectors::answers(&folder).expect("the vectors can be read");
    assert!(answers.len() > 500, "only {} cases", answers.len());
    for (file, name, case, answer) in answers {
        if let Some(answer) = answer {
            assert!(agrees(&case, &answer), "{} {}: {}", file, name, answer);
        }
    }
}

fn agrees(case: &Value, answer: &Value) -> bool {
    let expect = &case["expect"];
    if let Some(header) = answer.get("header") {
        return same_header(header, &expect["ok"]);
    }
    for direct in ["crc", "digest"] {
        if let Some(found) = answer.get(direct) {
            return *found == case[direct];
        }
    }
    if let Some(code) = answer.get("error") {
        return Some(code) == expect.get("error");
    }
    let payloads = answer.get("payloads").map_or(true, |count| *count == expect["payloads"]);
    payloads && sorted(&answer["ok"]) == sorted(&expect["ok"])
}

/// Tensors that lie at the same place have no order.
fn sorted(ok: &Value) -> Value {
    let mut ok = ok.clone();
    if let Some(tensors) = ok.get_mut("tensors").and_then(Value::as_array_mut) {
        tensors.sort_by_key(|t| (t["begin"].as_u64(), t["end"].as_u64(), t["name"].to_string()));
    }
    ok
}

fn same_header(header: &Value, expected: &Value) -> bool {
    let text = header.as_str().unwrap_or_default();
    let mut found: Value = serde_json::from_str(text).unwrap_or(Value::Null);
    let number = found.as_object_mut().and_then(|fields| fields.remove("wbp"));
    number == Some(json!(1)) && found == *expected
}
