//! What messages mean that leave fields out: the JSON Schema of the messages has the defaults.

use serde_json::Value;
use std::path::Path;

pub struct Defaults(Value);

impl Defaults {
    pub fn read() -> Defaults {
        let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/protocol/messages.schema.json");
        Defaults(serde_json::from_slice(&std::fs::read(file).unwrap()).unwrap())
    }

    /// Returns a message with all its fields; a value that is not a message as it is.
    pub fn filled(&self, mut message: Value) -> Value {
        if let Some(kind) = message["type"].as_str() {
            let schema = &self.0["$defs"][kind];
            self.fill(schema, &mut message);
        }
        message
    }

    fn fill(&self, schema: &Value, value: &mut Value) {
        if let Some(name) = schema["$ref"].as_str() {
            return self.fill(&self.0["$defs"][name.trim_start_matches("#/$defs/")], value);
        }
        if schema["anyOf"].is_array() {
            return self.fill(&schema["anyOf"][0], value); // the other one is null
        }
        if let Some(fields) = value.as_object_mut() {
            for (name, property) in schema["properties"].as_object().into_iter().flatten() {
                if let Some(default) = property.get("default") {
                    fields.entry(name).or_insert_with(|| default.clone());
                }
            }
            for (name, field) in fields {
                let property = schema["properties"].get(name);
                self.fill(property.unwrap_or(&schema["additionalProperties"]), field);
            }
        } else if let Some(items) = value.as_array_mut() {
            items.iter_mut().for_each(|item| self.fill(&schema["items"], item));
        }
    }
}
