//! Client of the weight bus. A `Worker` receives a model's weights from its trainer, version by
//! version. Each version is complete, verified, and written in place. A `Publisher` sends the
//! versions, and reports which worker runs which version.
//!
//! The README has examples; start with `Worker` and `Publisher`.
#![deny(unsafe_code)]
// A literal of a message ends with `..Default::default()`, so that it need not list a new field.
#![allow(clippy::needless_update)]

#[cfg(target_endian = "big")]
compile_error!("weightbus: tensors on the bus are little-endian, and this crate swaps no bytes");

mod applying;
mod companions;
mod control;
mod curve;
mod decoder;
mod dtype;
mod element;
mod endpoint;
mod error;
mod framing;
mod gate;
mod handshakes;
mod keys;
mod model;
mod names;
mod probe;
mod raw;
mod ready_queue;
mod run;
mod snapshot;
mod stream;
mod subscription;
mod threads;
mod waker;
mod words;
mod worker;

pub use applying::Offer;
pub use dtype::Dtype;
pub use element::{
    to_f32, Bool, Element, F4Pair, F6E2M3Byte, F6E3M2Byte, F8E4M3Fnuz, F8E5M2Fnuz, SmallFloat, BF16, C64,
    F16, F8E4M3, F8E5M2, F8E8M0,
};
pub use error::Error;
pub use follower::ModelState;
pub use keys::WorkerKeys;
pub use layout::{Layout, TensorInfo};
pub use limits::Timing;
pub use machine::State;
pub use model::{Model, Tensor, Weights, WeightsGuard};
pub use protocol::codes::Code;
pub use publisher::{
    Encoding, Outcome, PublishOptions, Publisher, PublisherBuilder, Publishing, Receipt, Require, TensorView,
    Wait, WorkerEvent, WorkerEventKind, WorkerReceipt, WorkerState, WorkerStatus,
};
pub use raw::cast::Plain;
pub use run::Event;
pub use snapshot::Snapshot;
pub use stream::UpdateStream;
pub use worker::{Builder, Update, Updates, Worker};

// The protocol without sockets: for conformance tests, fuzzers and tools. It may change in any
// version of this crate.
#[doc(hidden)]
pub mod addresses;
#[doc(hidden)]
pub mod ages;
#[doc(hidden)]
pub mod base64;
#[doc(hidden)]
pub mod casting;
pub mod checksum;
#[doc(hidden)]
pub mod delta;
#[doc(hidden)]
pub mod digest;
#[doc(hidden)]
pub mod effects;
#[doc(hidden)]
pub mod fetch_planner;
#[doc(hidden)]
pub mod fields;
#[doc(hidden)]
pub mod follower;
#[doc(hidden)]
pub mod json;
#[doc(hidden)]
pub mod keyring;
#[doc(hidden)]
pub mod layout;
#[doc(hidden)]
pub mod layouts;
#[doc(hidden)]
pub mod limits;
#[doc(hidden)]
pub mod machine;
#[doc(hidden)]
pub mod messages;
#[doc(hidden)]
pub mod patches;
#[doc(hidden)]
pub mod patching;
#[doc(hidden)]
pub mod phases;
#[doc(hidden)]
pub mod protocol;
#[doc(hidden)]
pub mod publisher;
#[doc(hidden)]
pub mod reports;
#[doc(hidden)]
pub mod sealing;
#[doc(hidden)]
pub mod segment;
#[doc(hidden)]
pub mod sources;
#[doc(hidden)]
pub mod staging;
#[doc(hidden)]
pub mod transfer;
#[doc(hidden)]
pub mod version_store;
#[doc(hidden)]
pub mod zmtp;

/// Compiles the example of the README.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

/// Helpers for the tests of several modules.
#[cfg(test)]
mod tests {
    use crate::effects::Host;
    use crate::layout::Layout;
    use crate::staging::{Buffer, Source, StagedVersion};
    use std::sync::Arc;

    pub struct AnyLayout;

    impl Host for AnyLayout {
        fn fault(&self, _model: &str, _layout: &Layout) -> Option<String> {
            None
        }
    }

    pub fn layout(json: &str) -> Layout {
        Layout::parse(&[&(json.len() as u64).to_le_bytes(), json.as_bytes()].concat()).unwrap()
    }

    /// A version of epoch 1.
    pub fn staged(model: &str, version: u64, layout: Layout, buffer: Buffer) -> StagedVersion {
        StagedVersion {
            model: model.to_owned(),
            key: (1, version),
            layout: Arc::new(layout),
            source: Source::Buffer(buffer),
            digest: "d".to_owned(),
            encoding: "",
            metadata: Default::default(),
            keep: false,
        }
    }
}
