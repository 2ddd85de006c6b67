//! Reads the fields of a JSON object one by one, and checks their types and bounds.
//!
//! A fault's text completes a sentence that begins with the name of the field.

use crate::base64;
use crate::json::{Object, Value};
use crate::limits::{INTEGER_MAX, NAME_MAX};
use serde::de::value::{Error, StrDeserializer};
use serde::de::{DeserializeOwned, IntoDeserializer};
use std::collections::BTreeMap;
use std::ops::RangeInclusive;

/// The text of the error for an invalid field.
pub type Fault = String;

/// A JSON object in a header. Fields that are not read are ignored, so that later protocols can add
/// fields.
pub struct Fields<'a>(pub &'a Object);

impl Fields<'_> {
    pub fn required<T>(&self, field: &str, read: impl Fn(&Value) -> Result<T, Fault>) -> Result<T, Fault> {
        let value = self.0.get(field).ok_or_else(|| format!("{:?} is missing", field))?;
        read(value).map_err(|fault| format!("{:?} {}", field, fault))
    }

    /// Reads a field that may be missing.
    pub fn optional<T: Default>(
        &self,
        field: &str,
        read: impl Fn(&Value) -> Result<T, Fault>,
    ) -> Result<T, Fault> {
        self.or(field, T::default(), read)
    }

    /// Reads a field, or returns the default if it is missing.
    pub fn or<T>(
        &self,
        field: &str,
        default: T,
        read: impl Fn(&Value) -> Result<T, Fault>,
    ) -> Result<T, Fault> {
        if self.0.contains_key(field) {
            self.required(field, read)
        } else {
            Ok(default)
        }
    }
}

/// True if a value is the default of its type, so that a message may omit it.
pub fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

// Readers of values, one for each type of the protocol.

pub fn within(bounds: RangeInclusive<u64>) -> impl Fn(&Value) -> Result<u64, Fault> {
    move |value| match value {
        Value::Integer(number) if bounds.contains(number) => Ok(*number),
        other => Err(type_fault(other, &format!("an integer from {:?}", bounds))),
    }
}

pub fn count(value: &Value) -> Result<u64, Fault> {
    within(0..=INTEGER_MAX)(value)
}

pub fn positive(value: &Value) -> Result<u64, Fault> {
    within(1..=INTEGER_MAX)(value)
}

pub fn uint32(value: &Value) -> Result<u32, Fault> {
    within(0..=u32::MAX.into())(value).map(|number| number as u32)
}

pub fn boolean(value: &Value) -> Result<bool, Fault> {
    match value {
        Value::Bool(value) => Ok(*value),
        other => Err(type_fault(other, "true or false")),
    }
}

fn string(value: &Value) -> Result<&str, Fault> {
    match value {
        Value::Text(value) => Ok(value),
        other => Err(type_fault(other, "a string")),
    }
}

/// Reads a string. Returns the fault `fault` unless `is_valid` returns true for the string.
fn string_that(
    value: &Value,
    is_valid: impl Fn(&str) -> bool,
    fault: impl Fn() -> Fault,
) -> Result<String, Fault> {
    string(value).and_then(|text| if is_valid(text) { Ok(text.to_owned()) } else { Err(fault()) })
}

pub fn text(most: usize) -> impl Fn(&Value) -> Result<String, Fault> {
    let short = move |text: &str| text.chars().count() <= most;
    move |value| string_that(value, short, || format!("has more than {} characters", most))
}

pub fn name(value: &Value) -> Result<String, Fault> {
    string_that(value, is_name, || "is not a name".to_owned())
}

pub fn hex(digits: usize) -> impl Fn(&Value) -> Result<String, Fault> {
    let is_valid = move |text: &str| is_hex(text, digits);
    move |value| string_that(value, is_valid, || format!("must be {} hexadecimal digits", digits))
}

pub fn hex_or_empty(digits: usize) -> impl Fn(&Value) -> Result<String, Fault> {
    move |value| if string(value)?.is_empty() { Ok(String::new()) } else { hex(digits)(value) }
}

/// Reads a text in base64, without decoding it.
pub fn base64(most: usize) -> impl Fn(&Value) -> Result<String, Fault> {
    let is_valid = move |text: &str| base64::decode(text).map_or(false, |bytes| bytes.len() <= most);
    move |value| string_that(value, is_valid, || format!("must be at most {} bytes in base64", most))
}

/// Reads a variant of an enum from its name.
pub fn word<T: DeserializeOwned>(value: &Value) -> Result<T, Fault> {
    let word: StrDeserializer<Error> = string(value)?.into_deserializer();
    T::deserialize(word).map_err(|_| "is an unknown word".to_owned())
}

/// Reads a variant of an enum from its name; `None` for an empty text.
pub fn word_or_empty<T: DeserializeOwned>(value: &Value) -> Result<Option<T>, Fault> {
    if string(value)?.is_empty() {
        Ok(None)
    } else {
        word(value).map(Some)
    }
}

pub fn object<T>(read: impl Fn(&Fields) -> Result<T, Fault>) -> impl Fn(&Value) -> Result<T, Fault> {
    move |value| match value {
        Value::Object(object) => {
            read(&Fields(object)).map_err(|fault| format!("is an object in which {}", fault))
        }
        other => Err(type_fault(other, "an object")),
    }
}

pub fn nullable<T>(read: impl Fn(&Value) -> Result<T, Fault>) -> impl Fn(&Value) -> Result<Option<T>, Fault> {
    move |value| if *value == Value::Null { Ok(None) } else { read(value).map(Some) }
}

pub fn array<T>(
    most: usize,
    read: impl Fn(&Value) -> Result<T, Fault>,
) -> impl Fn(&Value) -> Result<Vec<T>, Fault> {
    move |value| match value {
        Value::List(list) if list.len() <= most => {
            let items: Result<_, _> = list.iter().map(&read).collect();
            items.map_err(|fault| format!("has an item that {}", fault))
        }
        other => Err(type_fault(other, &format!("an array of at most {} items", most))),
    }
}

pub fn map<T>(
    most: usize,
    key: impl Fn(&Value) -> Result<String, Fault>,
    read: impl Fn(&Value) -> Result<T, Fault>,
) -> impl Fn(&Value) -> Result<BTreeMap<String, T>, Fault> {
    let entry = move |(name, value): (&String, &Value)| {
        let name = key(&Value::Text(name.clone())).map_err(|fault| format!("has a key that {}", fault))?;
        Ok((name, read(value).map_err(|fault| format!("has a value that {}", fault))?))
    };
    move |value| match value {
        Value::Object(object) if object.len() <= most => object.iter().map(&entry).collect(),
        other => Err(type_fault(other, &format!("an object of at most {} entries", most))),
    }
}

fn type_fault(found: &Value, wanted: &str) -> Fault {
    format!("must be {}, not {}", wanted, found.kind())
}

/// True if a text consists of exactly `digits` lowercase hexadecimal digits.
pub fn is_hex(text: &str, digits: usize) -> bool {
    text.len() == digits && text.bytes().all(|c| matches!(c, b'0'..=b'9' | b'a'..=b'f'))
}

/// True if a text is valid as the name of a model or a worker.
pub fn is_name(text: &str) -> bool {
    let allowed = |c: u8| c.is_ascii_alphanumeric() || matches!(c, b'.' | b'_' | b'-');
    (1..=NAME_MAX).contains(&text.len()) && text.bytes().all(allowed)
}
