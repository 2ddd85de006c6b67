//! Reads the fields of a header one by one, and checks their bounds.

use crate::base64;
use crate::json::{Object, Value};
use crate::limits::{
    FEATURES_MAX, GROUP_KEYS_MAX, INTEGER_MAX, METADATA_MAX, METADATA_NAME_MAX, MODELS_MAX, NAME_MAX,
    TEXT_MAX,
};
use std::collections::BTreeMap;
use std::ops::RangeInclusive;

/// The text of the error for an invalid field.
pub type Fault = String;

/// A JSON object in a header. Fields that are not read are ignored, so that later versions of the
/// protocol can add fields.
pub struct Fields<'a>(pub &'a Object);

impl<'a> Fields<'a> {
    fn required(&self, field: &str) -> Result<&'a Value, Fault> {
        self.0.get(field).ok_or_else(|| format!("{:?} is missing", field))
    }

    /// Reads a required field.
    pub fn read<T>(
        &self,
        field: &str,
        read: impl FnOnce(&Self, &str) -> Result<T, Fault>,
    ) -> Result<T, Fault> {
        read(self, field)
    }

    /// Reads a field, or returns the default if it is missing.
    pub fn or<T>(
        &self,
        field: &str,
        default: T,
        read: impl FnOnce(&Self, &str) -> Result<T, Fault>,
    ) -> Result<T, Fault> {
        if self.0.contains_key(field) {
            read(self, field)
        } else {
            Ok(default)
        }
    }

    /// Reads a field that may be null or missing.
    pub fn nullable<T>(
        &self,
        field: &str,
        read: impl FnOnce(&Self, &str) -> Result<T, Fault>,
    ) -> Result<Option<T>, Fault> {
        match self.0.get(field) {
            None | Some(Value::Null) => Ok(None),
            Some(_) => read(self, field).map(Some),
        }
    }

    pub fn within(&self, field: &str, bounds: RangeInclusive<u64>) -> Result<u64, Fault> {
        match self.required(field)? {
            Value::Integer(value) if bounds.contains(value) => Ok(*value),
            other => Err(wrong(field, other, &format!("an integer from {:?}", bounds))),
        }
    }

    pub fn count(&self, field: &str) -> Result<u64, Fault> {
        self.within(field, 0..=INTEGER_MAX)
    }

    pub fn positive(&self, field: &str) -> Result<u64, Fault> {
        self.within(field, 1..=INTEGER_MAX)
    }

    pub fn boolean(&self, field: &str) -> Result<bool, Fault> {
        match self.required(field)? {
            Value::Bool(value) => Ok(*value),
            other => Err(wrong(field, other, "true or false")),
        }
    }

    fn string(&self, field: &str) -> Result<&'a str, Fault> {
        match self.required(field)? {
            Value::Text(value) => Ok(value),
            other => Err(wrong(field, other, "a string")),
        }
    }

    pub fn text(&self, field: &str, characters_max: usize) -> Result<String, Fault> {
        let text = self.string(field)?;
        if text.chars().count() > characters_max {
            return Err(format!("{:?} has more than {} characters", field, characters_max));
        }
        Ok(text.to_owned())
    }

    pub fn name(&self, field: &str) -> Result<String, Fault> {
        let text = self.string(field)?;
        if is_name(text) {
            Ok(text.to_owned())
        } else {
            Err(format!("{:?} is no name", field))
        }
    }

    pub fn hex(&self, field: &str, digits: usize) -> Result<String, Fault> {
        let text = self.string(field)?;
        if is_hex(text, digits) {
            Ok(text.to_owned())
        } else {
            Err(format!("{:?} must be {} hexadecimal digits", field, digits))
        }
    }

    /// Reads a digest, or an empty text if the bytes were not hashed.
    pub fn digest_or_empty(&self, field: &str) -> Result<String, Fault> {
        if self.string(field)?.is_empty() {
            Ok(String::new())
        } else {
            self.hex(field, 64)
        }
    }

    /// Reads a text that must be one of these words. Returns the value beside that word.
    pub fn one_of<T: Copy>(&self, field: &str, words: &[(&str, T)]) -> Result<T, Fault> {
        let text = self.string(field)?;
        let found = words.iter().find(|(word, _)| *word == text);
        found.map(|(_, meaning)| *meaning).ok_or_else(|| format!("{:?} is an unknown word", field))
    }

    pub fn object(&self, field: &str) -> Result<Fields<'a>, Fault> {
        match self.required(field)? {
            Value::Object(object) => Ok(Fields(object)),
            other => Err(wrong(field, other, "an object")),
        }
    }

    /// Reads an object whose keys are names of models.
    pub fn models<T>(
        &self,
        field: &str,
        read: impl Fn(&Self, &str) -> Result<T, Fault>,
    ) -> Result<BTreeMap<String, T>, Fault> {
        let object = self.object(field)?;
        if object.0.len() > MODELS_MAX {
            return Err(format!("{:?} has more than {} entries", field, MODELS_MAX));
        }
        let entry = |model: &String| {
            if !is_name(model) {
                return Err(format!("{:?} has a key that is no name", field));
            }
            Ok((model.clone(), read(&object, model)?))
        };
        object.0.keys().map(entry).collect()
    }

    /// Reads the metadata of a version: a map from names to texts.
    pub fn metadata(&self, field: &str) -> Result<BTreeMap<String, String>, Fault> {
        let object = self.object(field)?;
        if object.0.len() > METADATA_MAX {
            return Err(format!("{:?} has more than {} entries", field, METADATA_MAX));
        }
        let entry = |name: &String| {
            if name.chars().count() > METADATA_NAME_MAX {
                return Err(format!("{:?} has a name of more than {} characters", field, METADATA_NAME_MAX));
            }
            Ok((name.clone(), object.text(name, TEXT_MAX)?))
        };
        object.0.keys().map(entry).collect()
    }

    pub fn names(&self, field: &str) -> Result<Vec<String>, Fault> {
        self.texts(field, FEATURES_MAX, is_name, "names")
    }

    /// Reads at most `GROUP_KEYS_MAX` group keys.
    pub fn keys(&self, field: &str) -> Result<Vec<String>, Fault> {
        self.texts(field, GROUP_KEYS_MAX, |text| is_hex(text, 64), "64 hexadecimal digits each")
    }

    fn texts(
        &self,
        field: &str,
        most: usize,
        sound: impl Fn(&str) -> bool,
        what: &str,
    ) -> Result<Vec<String>, Fault> {
        let text = |item: &Value| match item {
            Value::Text(text) if sound(text) => Ok(text.clone()),
            other => Err(wrong(field, other, &format!("an array of {}", what))),
        };
        self.list(field, most, what)?.iter().map(text).collect()
    }

    /// Reads a list of 32-bit checksums, each of which may be null. More than `most` are a fault.
    pub fn checksums(&self, field: &str, most: usize) -> Result<Vec<Option<u32>>, Fault> {
        let sum = |item: &Value| match item {
            Value::Null => Ok(None),
            Value::Integer(sum) if *sum <= u64::from(u32::MAX) => Ok(Some(*sum as u32)),
            other => Err(wrong(field, other, "an array of sums of 32 bits")),
        };
        self.list(field, most, "sums")?.iter().map(sum).collect()
    }

    /// Reads a list of at most `most` objects.
    pub fn objects<T>(
        &self,
        field: &str,
        most: usize,
        read: impl Fn(&Fields) -> Result<T, Fault>,
    ) -> Result<Vec<T>, Fault> {
        let object = |item: &Value| match item {
            Value::Object(object) => read(&Fields(object)),
            other => Err(wrong(field, other, "an array of objects")),
        };
        self.list(field, most, "objects")?.iter().map(object).collect()
    }

    fn list(&self, field: &str, most: usize, what: &str) -> Result<&'a [Value], Fault> {
        match self.required(field)? {
            Value::List(list) if list.len() <= most => Ok(list),
            other => Err(wrong(field, other, &format!("an array of at most {} {}", most, what))),
        }
    }

    /// Reads a text in base64, without decoding it.
    pub fn base64(&self, field: &str) -> Result<String, Fault> {
        let text = self.string(field)?;
        match base64::decode(text) {
            Some(_) => Ok(text.to_owned()),
            None => Err(format!("{:?} is no base64", field)),
        }
    }
}

fn wrong(field: &str, found: &Value, wanted: &str) -> Fault {
    format!("{:?} must be {}, not {}", field, wanted, found.kind())
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
